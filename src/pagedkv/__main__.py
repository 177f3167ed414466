"""``python -m pagedkv``: the command line, also without an installed script."""

from pagedkv.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
