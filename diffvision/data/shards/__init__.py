"""WebDataset shards on disk and on servers: index, order, random access, loading, checks, writing.

The ground of `data`: nothing here knows images or text.
"""
