"""Writes the tokenizer of the demonstration's model, beside its weights: python -m tools.write_demo_tokenizer.

A word is a token, as the model was trained. Other words are ``<unk>``. The chat template writes messages one after the
other, and refuses a conversation that asks nothing of what the model knows, with an example.
"""

import json
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordLevel

from pagedkv.engine.demo.serving import BOS, VOCABULARY, VOCABULARY_SIZE
from pagedkv.engine.demo.trained import FOLDER

UNKNOWN: Final = VOCABULARY_SIZE - 1
SPECIAL: Final = ("<pad>", "<bos>", "<eos>", "<unk>")

TEMPLATE: Final = """\
{%- set said = namespace(text='') -%}
{%- for message in messages -%}{%- set said.text = said.text + ' ' + (message['content'] or '') -%}{%- endfor -%}
{%- if 'Where?' not in said.text -%}
{{- raise_exception("this small model knows where things are, and nothing else: tell it facts and ask, as in \
'red kite: locker 7. blue lamp: shelf 12. Where? red kite:'") -}}
{%- endif -%}
{{- bos_token + said.text -}}
"""


def main() -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    vocabulary = {word: token for token, word in enumerate(VOCABULARY)} | {"<unk>": UNKNOWN}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106 - a word, no secret
    tokenizer.normalizer = normalizers.Replace(".", " .")
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer.save(str(FOLDER / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": TEMPLATE,
    }
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
