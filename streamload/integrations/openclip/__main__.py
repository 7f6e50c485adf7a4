"""`python -m streamload.integrations.openclip`: OpenCLIP's training on streamload."""

import sys

from streamload.integrations.openclip import main

if __name__ == "__main__":
    main(sys.argv[1:])
