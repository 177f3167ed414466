"""The commands, one module each: options, help, and a call. The work is done outside this package."""
