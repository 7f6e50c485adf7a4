"""Image transforms (step I): decoding, random crops, resizing, normalisation; compiled or as given."""
