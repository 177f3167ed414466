"""``pagedkv new-key``: an API key of a tenant, and its entry for ``--api-keys``."""

from pathlib import Path
from typing import Annotated

import typer

from pagedkv.api_keys import KeyOwner, entry_of, new_key as make_key, parse_key_file, read_key_file
from pagedkv.cli.options import command
from pagedkv.cli.output_files import atomic_file, require_writable


@command
def new_key(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Whose key it is: tenants share no cached blocks.")],
    *,
    admin: Annotated[bool, typer.Option("--admin", help="The key may read metrics and the inspector.")] = False,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File of keys, which gets the entry; it is made if missing.")
    ] = None,
) -> None:
    """Make an API key for pagedkv serve --api-keys, and its entry for that file.

    The key is the only line of the standard output. It is stored nowhere: the entry has its digest.

    For example:

    pagedkv new-key team-a --file keys.toml

    pagedkv serve --api-keys keys.toml
    """
    key, digest = make_key()
    entry = entry_of(KeyOwner(tenant, admin), digest)
    if file is None:
        parse_key_file(entry, "the entry")
        typer.echo(f"Its entry for --api-keys:\n\n{entry}\nThe key, which is shown only here:\n", err=True)
    else:
        require_writable(file)
        if file.exists():
            read_key_file(file)
            entry = f"{file.read_text(encoding='utf-8').rstrip()}\n\n{entry}"
        parse_key_file(entry, str(file))
        with atomic_file(file) as written:
            written.write(entry.encode())
        typer.echo(f"{file} has its entry. The key, which is shown only here:", err=True)
    typer.echo(key)
