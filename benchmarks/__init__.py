"""What streamload claims about speed and memory, measured beside its peers; see README.md."""
