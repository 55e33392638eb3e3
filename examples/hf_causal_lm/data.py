"""The text, Python's language reference, which comes with Python. In windows, by `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any

from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerBase

VALIDATION = 0.1  # of all paragraphs


def paragraphs() -> Iterator[dict[str, str]]:
    """Each paragraph once: topics quote each other, and validation must not repeat training."""
    for text in dict.fromkeys("\n\n".join(topics.values()).split("\n\n")):
        yield {"text": text}


def windows(tokenizer: PreTrainedTokenizerBase, length: int) -> DatasetDict:
    """The sets "train" and "test": rows ``input_ids`` of `length` tokens each.

    `datasets` keeps the results of each step in its cache, and maps them from there.
    """

    def tokenize(rows: dict[str, list[str]]) -> dict[str, Any]:
        texts = [text + tokenizer.eos_token for text in rows["text"]]
        return {"input_ids": tokenizer(texts)["input_ids"]}

    def pack(rows: dict[str, list[list[int]]]) -> dict[str, Any]:
        """Cuts all texts, one after the other, into windows; drops the rest of the last one."""
        tokens = [token for text in rows["input_ids"] for token in text]
        starts = range(0, len(tokens) - length + 1, length)
        return {"input_ids": [tokens[start : start + length] for start in starts]}

    text = Dataset.from_generator(paragraphs).train_test_split(VALIDATION, seed=0)
    tokens = text.map(tokenize, batched=True, remove_columns="text")
    return tokens.map(pack, batched=True).with_format("torch")
