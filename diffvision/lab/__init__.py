"""What exists to study differential attention: further evaluations, datasets and lessons of the papers."""
