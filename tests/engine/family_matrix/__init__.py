"""Every type of decoders that transformers has, tried; what became of each is recorded, for docs/families.md."""
