"""Images with captions or labels: decoding, samples, evaluation folders, people's own images, DataModules."""
