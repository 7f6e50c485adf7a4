"""An environment for each peer: what is in it stands in NAME.txt, build.py makes it."""
