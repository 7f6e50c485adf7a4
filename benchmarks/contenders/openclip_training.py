"""open_clip's own training, as a program with the arguments NAME MODEL, and those of the training.

NAME is "stock" for its own loader, or "streamload"; MODEL a file with a model's configuration, or "-".
"""

import runpy
import sys

from benchmarks.torchvision_stub import define_torchvision_schemas

MODULES = {"stock": "open_clip_train.main", "streamload": "streamload.integrations.openclip"}


def main() -> None:
    name, model, *arguments = sys.argv[1:]
    define_torchvision_schemas()
    if model != "-":
        import open_clip

        open_clip.add_model_config(model)
    sys.argv[1:] = arguments
    runpy.run_module(MODULES[name], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
