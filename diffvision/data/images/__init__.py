"""Images with captions or labels: decoding, samples, evaluation folders, images as they lie on disk, DataModules."""
