"""What exists to study differential attention: further evaluations and lessons of the papers."""
