"""Tokenizers: every text round-trips, ids are stable, and published files are read with their own end of document."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from corpus import train_bpe

from core.base.errors import ConfigError, DataError, MissingExtraError
from core.tokenizers import load_tokenizer, tokenizer_path
from examples.gpt.byte_tokenizer import ByteTokenizer

TEXTS = [
    "def f(x):\n    return x + 1\n",
    "  two  spaces, a tab\t, CRLF\r\n and NUL \x00 ",
    "Grüße, 東京, \U0001f642, e\u0301, \ufeff",
    "a document that spells out <|endoftext|> is only text",
    "".join(map(chr, range(0x20, 0x250))),
]


def test_byte_ids_are_the_bytes():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids.tolist() == list(text.encode())
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode([104, 105, 256]) == "hi<|endoftext|>"
    assert tokenizer.decode([0xFF, 104]) == "\ufffdh"


def test_byte_ids_equal_the_librarys():
    import tokenizers

    library = tokenizers.Tokenizer.from_str(ByteTokenizer().to_json())
    text = "".join(map(chr, [*range(0x80), *range(0x80, 0x800, 7), 0x1000, 0xFFFD, 0x10000, 0x10FFFF]))
    assert library.encode(text).ids == list(text.encode())
    symbols = [library.id_to_token(byte) for byte in range(256)]
    decoder = tokenizers.decoders.ByteLevel()
    assert [decoder.decode([symbol]) for symbol in symbols[:128]] == [chr(byte) for byte in range(128)]
    assert sorted(symbols) == sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def test_bpe_roundtrip_is_deterministic(tmp_path: Path):
    corpus = ["the cat sat on the mat, the rat sat on the cat\n" * 5, "def the(cat): return cat\n" * 5]
    tokenizer = train_bpe(iter(corpus), 300)
    assert 257 < tokenizer.vocab_size <= 300
    for text in TEXTS + corpus:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.eod not in ids
    assert len(tokenizer.encode(corpus[0])) < len(corpus[0]) / 3
    assert train_bpe(iter(corpus), 300).to_json() == tokenizer.to_json()


def test_a_saved_tokenizer_is_found_next_to_its_corpus(tmp_path: Path):
    path = tokenizer_path(tmp_path / "corpus")
    assert path == tmp_path / "corpus.tokenizer.json"
    for tokenizer in (ByteTokenizer(), train_bpe(["aaa bbb aaa bbb"], 260)):
        tokenizer.save(path)
        loaded = load_tokenizer(path)
        assert (loaded.vocab_size, loaded.eod, loaded.to_json()) == (
            tokenizer.vocab_size,
            tokenizer.eod,
            tokenizer.to_json(),
        )
        assert loaded.encode("aaa bbb").tolist() == tokenizer.encode("aaa bbb").tolist()


def _published(folder: Path, special: dict[str, int], **fields: object) -> Path:
    """Returns a tokenizer.json with one id for each of a few words, as another project might publish it."""
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token, number in special.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1, "b": 2}, "unk_token": "[UNK]"},
        **fields,
    }
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content))
    return path


def test_end_of_document_sources(tmp_path: Path):
    path = _published(tmp_path, {"<s>": 3, "</s>": 4, "<|eot|>": 5})
    assert load_tokenizer(path).eod == 4
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|eot|>"}}))
    assert load_tokenizer(path).eod == 5
    assert load_tokenizer(path, "<s>").eod == 3
    load_tokenizer(path, "<s>").save(tmp_path / "other.tokenizer.json")
    assert load_tokenizer(tmp_path / "other.tokenizer.json").eod == 3


def test_gaps_in_the_ids_count_into_the_vocabulary_size(tmp_path: Path):
    model = {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1, "</s>": 2, "b": 7}, "unk_token": "[UNK]"}
    tokenizer = load_tokenizer(_published(tmp_path, {}, model=model))
    assert tokenizer.vocab_size == 8
    assert tokenizer.encode("b").tolist() == [7]


def test_published_truncation_is_ignored(tmp_path: Path):
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tokenizer = load_tokenizer(_published(tmp_path, {"</s>": 3}, truncation=truncation))
    assert tokenizer.encode("a b a b a </s>").tolist()[:5] == [1, 2, 1, 2, 1]
    assert 3 not in tokenizer.encode("a </s>")


def test_a_published_padding_adds_no_tokens(tmp_path: Path):
    padding = {
        "strategy": {"Fixed": 8},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 3,
        "pad_type_id": 0,
        "pad_token": "</s>",
    }
    path = _published(tmp_path, {"</s>": 3}, padding=padding)
    assert load_tokenizer(path).encode("a b a").tolist() == [1, 2, 1]


def test_malformed_tokenizers_are_refused(tmp_path: Path):
    with pytest.raises(DataError, match=r"absent\.json: the tokenizer cannot be read \(No such file"):
        load_tokenizer(tmp_path / "absent.json")
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(DataError, match=r"x\.json: no Hugging Face tokenizer\.json"):
        load_tokenizer(tmp_path / "x.json")
    path = _published(tmp_path, {"<s>": 3})
    with pytest.raises(DataError, match=r"no end-of-document token '<\|endoftext\|>' or .*: <s>"):
        load_tokenizer(path)
    with pytest.raises(DataError, match="no end-of-document token '<stop>'"):
        load_tokenizer(path, "<stop>")


@pytest.mark.parametrize(
    ("vocabulary", "said"),
    [
        ({}, "the tokenizer's vocabulary is empty"),
        ({"a": 0, "</s>": 2**32 - 1}, "has 2 tokens, and ids up to 42949672"),
    ],
)
def test_malformed_vocabularies_are_refused(tmp_path: Path, vocabulary: dict[str, int], said: str):
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"}
    (tmp_path / "t.json").write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": []}))
    with pytest.raises(DataError, match=said):
        load_tokenizer(tmp_path / "t.json", "</s>")


def test_library_panic_is_a_file_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class PanicException(BaseException):
        pass

    def panic(_: str) -> None:
        raise PanicException("index out of bounds")

    library = SimpleNamespace(Tokenizer=SimpleNamespace(from_str=panic))
    monkeypatch.setattr("core.tokenizers.tokenizers_library", lambda: library)
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(DataError, match=r"no Hugging Face tokenizer\.json \('index out of bounds'\)"):
        load_tokenizer(tmp_path / "t.json")


def test_unpaired_surrogate_is_named():
    with pytest.raises(DataError, match=r"unpaired surrogate, '\\ud83d' at character 2"):
        ByteTokenizer().encode("ab\ud83d")


def test_a_vocabulary_too_small_for_bytes_is_refused():
    with pytest.raises(ConfigError, match="vocab_size is 256; a byte-level BPE has 256 bytes"):
        train_bpe(["text"], 256)


def test_saving_without_a_folder_is_named(tmp_path: Path):
    with pytest.raises(OSError, match="No such file"):
        ByteTokenizer().save(tmp_path / "absent" / "c.tokenizer.json")


def test_the_missing_library_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"needs the package 'tokenizers': pip install 'shardstack\[train\]'"):
        ByteTokenizer()
