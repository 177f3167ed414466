"""``python -m pagedkv.engine.demo.training OUT``. A door: the room is :mod:`pagedkv.serving.engine.demo.training`."""

from pagedkv.serving.engine.demo.training import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
