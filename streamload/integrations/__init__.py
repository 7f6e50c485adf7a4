"""streamload in training code by others: OpenCLIP, transformers."""
