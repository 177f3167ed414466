"""Try every type of decoders that the installed transformers has, and write what becomes of each.

    python -m tests.engine.family_matrix                 all types; half an hour
    python -m tests.engine.family_matrix llama laguna    these; the others stay as they are written
    python -m tests.engine.family_matrix --page          none: the page is written anew from the record

Writes ``recorded.json`` beside this file, and the page made of it, docs/families.md.
"""

import argparse
import warnings

import torch
import transformers

from tests.engine.family_matrix.page import PAGE, page_of
from tests.engine.family_matrix.record import PATH, all_types, read_record, write_record
from tests.engine.family_matrix.trying import Outcome, try_type


def main() -> None:
    """Try types, and write record and page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model_type of what is to be tried; all if none is named")
    parser.add_argument("--page", action="store_true", help="try none")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    is_part = arguments.page or arguments.types
    outcomes: dict[str, Outcome] = dict(read_record().outcomes) if is_part and PATH.exists() else {}
    for model_type in [] if arguments.page else arguments.types or all_types():
        outcomes[model_type] = try_type(model_type)
        print(model_type, outcomes[model_type], flush=True)  # noqa: T201 - a command
        write_record(outcomes)
    PAGE.write_text(page_of(read_record()), encoding="utf-8")


if __name__ == "__main__":
    main()
