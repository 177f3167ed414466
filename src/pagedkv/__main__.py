"""``python -m pagedkv``: the command line, also where no script was installed."""

from pagedkv.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
