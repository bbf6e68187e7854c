"""Text becomes a corpus: the same bytes for any number of workers, whole or not at all."""

import json
import subprocess
import sys
from pathlib import Path

import corpus
import pytest
from corpus import prepare

from core.base.errors import ConfigError, DataError, MissingExtraError
from core.datasets.indexed_dataset import IndexedDataset
from core.tokenizers import Tokenizer, load_tokenizer, tokenizer_path
from examples.gpt.byte_tokenizer import ByteTokenizer

DOCUMENTS = ["one", "two\nlines é", "", "three <|endoftext|> three", "four " * 2000]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS * 3))
    return path


def _texts(prefix: Path) -> list[str]:
    tokenizer = load_tokenizer(tokenizer_path(prefix))
    written = IndexedDataset(prefix)
    assert {int(document[-1]) for document in written} == {tokenizer.eod}
    assert written.document_indices.tolist() == list(range(len(written) + 1))
    return [tokenizer.decode(document[:-1]) for document in written]


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_documents_come_back_with_their_end(tmp_path: Path, source: Path, tokenizer: str):
    result = prepare([source], tmp_path / "c", tokenizer=tokenizer, vocab_size=300)
    expected = [text for text in DOCUMENTS * 3 if text]
    assert _texts(tmp_path / "c") == expected
    assert (result.num_files, result.num_documents) == (1, len(expected))
    assert result.num_tokens == sum(IndexedDataset(tmp_path / "c").sequence_lengths)
    assert result.vocab_size == load_tokenizer(tokenizer_path(tmp_path / "c")).vocab_size


def test_a_tokenizer_file_is_used_and_kept(tmp_path: Path, source: Path):
    ByteTokenizer().save(tmp_path / "mine.json")
    prepare([source], tmp_path / "c", tokenizer=tmp_path / "mine.json")
    prepare([source], tmp_path / "d")
    for suffix in (".bin", ".idx", ".tokenizer.json"):
        assert (tmp_path / f"c{suffix}").read_bytes() == (tmp_path / f"d{suffix}").read_bytes()


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_the_number_of_workers_does_not_show(
    tmp_path: Path, source: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(corpus, "_CHUNK_BYTES", 30)  # many chunks, and more than are in flight at once
    (tmp_path / "more.txt").write_text("\n\n".join(f"paragraph {number}" * (number % 7) for number in range(40)))
    inputs = [source, tmp_path / "more.txt"]
    for workers in (1, 2):
        options = {"tokenizer": tokenizer, "vocab_size": 280, "split_on": "blank-lines", "workers": workers}
        prepare(inputs, tmp_path / f"w{workers}", **options)
    for suffix in (".bin", ".idx", ".tokenizer.json"):
        assert (tmp_path / f"w1{suffix}").read_bytes() == (tmp_path / f"w2{suffix}").read_bytes()
    assert len(IndexedDataset(tmp_path / "w1")) == 12 + 34


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failure_leaves_the_old_corpus_and_nothing_else(
    tmp_path: Path, source: Path, workers: int, monkeypatch: pytest.MonkeyPatch
):
    prepare([source], tmp_path / "c")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(corpus, "_CHUNK_BYTES", 30)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n' * 20 + '{"txt": 1}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl, line 21: no key 'text'; keys there: 'txt'"):
        prepare([source, bad], tmp_path / "c", workers=workers)
    bad.unlink()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_old_corpus_is_never_next_to_a_new_tokenizer(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch):
    prepare([source], tmp_path / "c")
    readable: list[bool] = []
    save = Tokenizer.save

    def observed(self: Tokenizer, path: Path) -> None:
        readable.append(IndexedDataset.exists(tmp_path / "c"))
        save(self, path)
        readable.append(IndexedDataset.exists(tmp_path / "c"))

    monkeypatch.setattr(Tokenizer, "save", observed)
    prepare([source], tmp_path / "c", tokenizer="bpe", vocab_size=300)
    assert readable == [False, False]
    assert _texts(tmp_path / "c")[0] == "one"


def test_an_unpaired_surrogate_is_named_with_its_line(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": "x \\ud83d"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: the text holds an unpaired surrogate, '\\ud83d'"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "c")


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_a_corpus_without_text_is_refused(tmp_path: Path, tokenizer: str):
    (tmp_path / "a.txt").write_bytes(b" \n\n")
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match=r"the corpus is empty: no document with text in 2 files \(.*a\.txt, "):
        prepare([tmp_path / "a.txt", tmp_path / "b.jsonl"], tmp_path / "c", tokenizer=tokenizer)
    assert not IndexedDataset.exists(tmp_path / "c")


def test_outputs_without_a_place_are_refused_before_any_work(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(DataError, match=r"the output folder cannot be created, .* is a file"):
        prepare([tmp_path / "no such input"], source / "c")
    with pytest.raises(DataError, match=r"a folder, and the output prefix is a path in one; try .*corpus"):
        prepare([source], tmp_path)
    monkeypatch.setattr(corpus.os, "access", lambda *_: False)
    with pytest.raises(DataError, match="the output folder cannot be written; make it writable"):
        prepare([source], tmp_path / "c")


def test_a_full_disk_is_named(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(corpus.IndexedDatasetBuilder, "add_document", full)
    with pytest.raises(DataError, match=r"c: the corpus cannot be written \(No space left on device\)"):
        prepare([source], tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["source.jsonl"]


def test_a_bpe_learns_from_the_first_documents_only(tmp_path: Path):
    (tmp_path / "a.txt").write_text("abab" * 50 + "\n" + "xyxy" * 5000)
    prepare(
        [tmp_path / "a.txt"], tmp_path / "c", tokenizer="bpe", vocab_size=260, split_on="line", bpe_training_bytes=100
    )
    vocabulary = json.loads(tokenizer_path(tmp_path / "c").read_text())["model"]["vocab"]
    assert "ab" in vocabulary
    assert not any("xy" in token for token in vocabulary)


def test_a_progress_bar_counts_the_bytes_of_the_files(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
):
    prepare([source], tmp_path / "c", progress=True)
    assert "tokenising: 100%" in capsys.readouterr().err
    prepare([source], tmp_path / "c")
    assert capsys.readouterr() == ("", "")


def test_missing_tqdm_names_the_extra(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(MissingExtraError, match="A progress bar needs the package 'tqdm'"):
        prepare([source], tmp_path / "c", progress=True)


def test_no_worker_is_refused(tmp_path: Path, source: Path):
    with pytest.raises(ConfigError, match="workers is 0"):
        prepare([source], tmp_path / "c", workers=0)


def test_workers_start_without_torch():
    code = "import sys; sys.path.append('examples/gpt'); import corpus; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=600, cwd=Path(__file__).parents[3]).returncode == 0


def test_a_bpe_is_learned_from_something(tmp_path: Path, source: Path):
    with pytest.raises(ConfigError, match="bpe_training_bytes is -5; a BPE learns from a positive number"):
        prepare([source], tmp_path / "c", tokenizer="bpe", bpe_training_bytes=-5)
