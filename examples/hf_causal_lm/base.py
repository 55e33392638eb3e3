"""A small Llama with random weights and a tokenizer, saved as a model hub would send them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from data import paragraphs
from huggingface_hub.constants import HF_HOME
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(HF_HOME) / "trialflow-example" / "llama"
VOCABULARY = 2048
END = "<|end|>"


def base_model() -> str:
    """The folder of the model, for ``from_pretrained``; made when it is first needed."""
    if not FOLDER.exists():
        FOLDER.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=FOLDER.parent))
        tokenizer = new_tokenizer()
        tokenizer.save_pretrained(made)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
        LlamaForCausalLM(config).save_pretrained(made)
        os.replace(made, FOLDER)  # complete, or not there
    return str(FOLDER)


def new_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, trained on the text."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        (row["text"] for row in paragraphs()),
        vocab_size=VOCABULARY,
        special_tokens=[END],
        show_progress=False,
    )
    return PreTrainedTokenizerFast(tokenizer_object=trained, eos_token=END, pad_token=END)
