"""``python -m pagedkv``: the command line, also without an installed script."""

from pagedkv.cli import main

if __name__ == "__main__":
    main()
