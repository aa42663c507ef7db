"""Byte and folder tokenizers: ids, the end of a document, padding that masks nothing real, refusals."""

import json

import numpy as np
import pytest

from megatron_gdn.tokenizer import build_tokenizer

TEXT = "naïve\r\n\x00 日本 \U0001f600 <|end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small byte-level BPE tokenizer, saved the way released models are."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<pad>", "<end>"], initial_alphabet=alphabet
    )
    core.train_from_iterator(["the quick brown fox and the lazy dog"] * 4, trainer)
    path = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<end>").save_pretrained(path)
    return path


def test_bytes_are_the_ids():
    tokenizer = build_tokenizer("byte")
    ids = tokenizer.tokenize(TEXT)
    assert ids == list(TEXT.encode("utf-8"))
    assert tokenizer.detokenize([*ids, tokenizer.eod, tokenizer.pad]) == TEXT
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.eos) == (257, 256, 256)


def test_byte_batch_keeps_dtype_and_order():
    rows = build_tokenizer("byte").encode_batch(["ab", "", "é"], np.uint16)
    assert [row.tolist() for row in rows] == [[97, 98], [], [195, 169]]
    assert {row.dtype for row in rows} == {np.dtype(np.uint16)}


def test_cut_character_is_shown_as_such():
    tokenizer = build_tokenizer("byte")
    assert tokenizer.detokenize(tokenizer.tokenize("aé")[:-1]) == "a\ufffd"


def test_folder_gives_the_ids_of_transformers(folder):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokenizer = build_tokenizer(str(folder))
    texts = ["the quick fox", TEXT, "", "dog " * 1000]
    rows = tokenizer.encode_batch(texts, np.int32)
    assert [row.tolist() for row in rows] == [
        theirs(text, add_special_tokens=False)["input_ids"] for text in texts
    ]
    assert [tokenizer.detokenize([*row.tolist(), tokenizer.eod]) for row in rows] == texts
    assert tokenizer.eod == theirs.convert_tokens_to_ids("<end>")
    assert tokenizer.vocab_size == max(theirs.get_vocab().values()) + 1


@pytest.mark.parametrize("name", ["byte", "folder"])
def test_pad_is_no_id(name, folder):
    """Also where the folder pads with its end token: masking pad must not mask the document's end."""
    tokenizer = build_tokenizer(str(folder) if name == "folder" else name)
    assert tokenizer.pad not in range(tokenizer.vocab_size)
    assert 0 <= tokenizer.eod < tokenizer.vocab_size


def test_identifiers_are_json_and_tell_tokenizers_apart(folder):
    names = [json.dumps(build_tokenizer(name).unique_identifiers) for name in ("byte", str(folder))]
    assert names[0] != names[1]


def test_half_a_surrogate_pair_is_refused(folder):
    for name in ("byte", str(folder)):
        with pytest.raises(UnicodeEncodeError):
            build_tokenizer(name).tokenize("\ud800")


def _no_end_token(path, good):
    (path / "tokenizer.json").write_text((good / "tokenizer.json").read_text())


def _model_without_vocabulary(path, good):
    (path / "config.json").write_text('{"model_type": "qwen3"}')


def _broken_json(path, good):
    (path / "tokenizer.json").write_text('{"version":')


def _broken_tokenizer(path, good):
    (path / "tokenizer.json").write_text('{"version": "1.0"}')


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path, good: path.rmdir(), "does not exist"),
        (lambda path, good: (path.rmdir(), path.write_text("x")), "is a file"),
        (lambda path, good: None, "cannot be read"),
        (_broken_json, "cannot be read"),
        (_broken_tokenizer, "cannot be read"),
        (_model_without_vocabulary, "no vocabulary (it holds config.json)"),
        (_no_end_token, "no eos_token"),
    ],
)
def test_folder_that_is_no_tokenizer_is_refused(make, words, folder, tmp_path):
    path = tmp_path / "tok"
    path.mkdir()
    make(path, folder)
    with pytest.raises(ValueError, match="--tokenizer") as caught:
        build_tokenizer(str(path))
    message = str(caught.value)
    assert str(path) in message
    assert words in message
    assert "\n" not in message
