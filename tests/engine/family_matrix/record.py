"""The record of a run over all types: what became of each, and with which version of transformers."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.engine.family_matrix.trying import Outcome

__all__ = ["PATH", "Record", "all_types", "read_record", "write_record"]

PATH: Final = Path(__file__).with_name("recorded.json")


@dataclass(frozen=True, slots=True)
class Record:
    """What became of all types.

    Args:
        transformers: the version; outcomes: by ``model_type``.
    """

    transformers: str
    outcomes: dict[str, Outcome]


def all_types() -> list[str]:
    """List the types that transformers makes decoders of (``AutoModelForCausalLM``)."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def read_record() -> Record:
    """Read what was recorded."""
    document = json.loads(PATH.read_text(encoding="utf-8"))
    outcomes = {name: Outcome(**{**each, "groups": tuple(each["groups"])}) for name, each in document["types"].items()}
    return Record(document["transformers"], outcomes)


def write_record(outcomes: dict[str, Outcome]) -> Record:
    """Write what became of all types, in their order."""
    record = Record(transformers.__version__, dict(sorted(outcomes.items())))
    types = {name: asdict(outcome) for name, outcome in record.outcomes.items()}
    text = json.dumps({"transformers": record.transformers, "types": types}, indent=1)
    PATH.write_text(text + "\n", encoding="utf-8")
    return record
