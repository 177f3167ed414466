"""The commands, one a module: options, help, and whom to call. What they do is done beside this package."""
