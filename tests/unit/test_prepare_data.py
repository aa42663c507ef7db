"""prepare-data from the command line to the host's datasets, and what it refuses."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split

from megatron_gdn import documents
from megatron_gdn.__main__ import main
from megatron_gdn.prepare_data import check_dataset
from megatron_gdn.tokenizer import ByteTokenizer

EOD = 256
ROOT = Path(__file__).parents[2]


def prepare(*inputs, out, flags=()) -> int:
    """Exit status of prepare-data with the byte tokenizer."""
    argv = ["prepare-data", "--output-prefix", str(out), "--tokenizer", "byte", "--workers", "1", *flags]
    return main([*argv, "--input", *map(str, inputs)])


def texts_of(prefix) -> list[str]:
    """Documents of a dataset, read by the host; every one must end in its only end-of-document id."""
    dataset = IndexedDataset(str(prefix))
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
    texts = []
    for number in range(len(dataset)):
        ids = dataset[number].tolist()
        assert ids.index(EOD) == len(ids) - 1
        texts.append(bytes(ids[:-1]).decode("utf-8"))
    return texts


def jsonl(*texts: str) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


@pytest.fixture
def corpus(tmp_path) -> Path:
    """A folder with plain files, JSON lines and folders that are to be left out."""
    folder = tmp_path / "corpus"
    for name, content in {
        "b.txt": "second",
        "a.PY": "first\r\n",
        "sub/z.jsonl": jsonl("third", "fourth"),
        "sub/deep/c.md": "fifth é",
        "sub/data.csv": "not asked for",
        "tests/t.py": "a test",
        "sub/tests/t.py": "another test",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode("utf-8"))
    return folder


def test_folder_round_trip_through_the_host(corpus, tmp_path, capsys):
    out = tmp_path / "new/folder/data"
    assert prepare(corpus, out=out, flags=["--exclude", "tests"]) == 0
    # Sorted by path: a.PY, b.txt, sub/deep/c.md, sub/z.jsonl.
    assert texts_of(out) == ["first\r\n", "second", "fifth é", "third", "fourth"]
    assert IndexedDataset(str(out)).index.dtype == np.uint16
    summary = capsys.readouterr().out
    tokens = sum(len(text.encode()) + 1 for text in texts_of(out))
    assert f"5 documents, {tokens} tokens (uint16), 0 skipped" in summary
    assert sorted(p.name for p in out.parent.iterdir()) == ["data.bin", "data.idx"]


def test_suffix_and_exclude_choose_the_files(corpus, tmp_path):
    assert prepare(corpus, out=tmp_path / "o", flags=["--suffix", ".csv", ".py", "--exclude", "deep"]) == 0
    assert texts_of(tmp_path / "o") == ["first\r\n", "not asked for", "another test", "a test"]


def test_named_files_are_taken_in_the_order_given(corpus, tmp_path):
    inputs = corpus / "sub/data.csv", corpus / "b.txt", corpus / "a.PY"
    assert prepare(*inputs, out=tmp_path / "o") == 0
    assert texts_of(tmp_path / "o") == ["not asked for", "second", "first\r\n"]


def test_workers_change_no_byte(tmp_path, monkeypatch, capsys):
    """Many blocks, with bad and empty documents among them, on one and on three processes."""
    monkeypatch.setattr(documents, "BLOCK_BYTES", 200)
    texts = ["x" * (n * 37 % 300) for n in range(300)]
    lines = [json.dumps({"text": text}) for text in texts]
    lines[50] = lines[250] = "{"
    source = tmp_path / "many.jsonl"
    source.write_text("\n".join(lines))
    files = [f"file {n} " * n for n in range(10)]
    for n, text in enumerate(files):
        (tmp_path / f"f{n}.txt").write_text(text)
    reports = []
    for workers in "1", "3":
        flags = ["--workers", workers, "--on-error", "skip"]
        assert prepare(tmp_path, out=tmp_path / f"out{workers}/d", flags=flags) == 0
        reports.append(capsys.readouterr().err)
    assert reports[0] == reports[1]
    assert [line.split(": ")[0] for line in reports[0].splitlines()] == [
        f"skipped {source}:51",
        f"skipped {source}:251",
    ]
    for ending in ".bin", ".idx":
        one, three = ((tmp_path / f"out{w}/d{ending}").read_bytes() for w in "13")
        assert one == three
    good = [text for n, text in enumerate(texts) if n not in (50, 250)]
    assert texts_of(tmp_path / "out3/d") == [text for text in files + good if text]


BAD_LINES = [
    (b'{"text": "a"', "invalid JSON: "),
    (b'{"text": "\xff"}', "invalid UTF-8 at byte 11 of the line"),
    (b'{"body": "a", "id": 1}', "no field 'text' (--text-field); it has body, id"),
    (b"{}", "no field 'text' (--text-field); it has none"),
    (b'{"text": 7}', "field 'text' must be a string, got int"),
    (b'{"text": null}', "field 'text' must be a string, got NoneType"),
    (b'["text"]', "a JSON object is needed, got list"),
    (b'{"text": "\\ud800"}', "half of a surrogate pair"),
    (b"[" * 200_000, "nested too deeply"),
    (b'{"text": ' + b"1" * 5000 + b"}", "invalid JSON: "),
]


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(("line", "reason"), BAD_LINES, ids=[reason for _, reason in BAD_LINES])
def test_bad_line_stops_or_is_skipped(line, reason, workers, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"text": "one"}\n' + line + b'\n{"text": "three"}\n')
    out = tmp_path / "out/d"

    assert prepare(source, out=out, flags=["--workers", workers]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {source}:2: ")
    assert reason in error
    assert "--on-error skip" in error
    assert error.count("\n") == 1
    assert list(out.parent.iterdir()) == []

    assert prepare(source, out=out, flags=["--workers", workers, "--on-error", "skip"]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith(f"skipped {source}:2: ")
    assert reason in captured.err
    assert "1 skipped as bad" in captured.out
    assert texts_of(out) == ["one", "three"]


def test_file_that_is_not_utf8_is_reported_at_its_line(tmp_path, capsys):
    bad, good = tmp_path / "bad.txt", tmp_path / "good.txt"
    bad.write_bytes(b"one\ntwo\nthr\xe9e\n")
    good.write_text("fine")
    assert prepare(bad, good, out=tmp_path / "o") == 2
    assert capsys.readouterr().err.startswith(f"error: {bad}:3: invalid UTF-8")
    assert prepare(bad, good, out=tmp_path / "o", flags=["--on-error", "skip"]) == 0
    assert texts_of(tmp_path / "o") == ["fine"]


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (jsonl("a", "b") + "\n", ["a", "b"]),
        (jsonl("a") + "  \n\n" + jsonl("b"), ["a", "b"]),
        (jsonl("a", "b").rstrip("\n"), ["a", "b"]),
        (jsonl("a", "b").replace("\n", "\r\n") + "\r\n", ["a", "b"]),
        ("\ufeff" + jsonl("a", "b"), ["a", "b"]),
        (jsonl("", "a", ""), ["a"]),
        ('{"text": "a\u2028b\x0bc"}\n'.replace("\x0b", "\\u000b"), ["a\u2028b\x0bc"]),
        ('{"text": "\\r\\n\\u0000\\ud83d\\ude00"}\n', ["\r\n\x00\U0001f600"]),
    ],
    ids=["blank last", "blank between", "no last end", "crlf", "bom", "empty", "line separators", "escapes"],
)
def test_shapes_of_json_lines(content, texts, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(content.encode("utf-8"))
    assert prepare(tmp_path / "in.jsonl", out=tmp_path / "o") == 0
    assert texts_of(tmp_path / "o") == texts


def test_text_file_keeps_its_bytes_but_for_the_mark(tmp_path):
    (tmp_path / "in.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\n\n\xef\xbb\xbf")
    assert prepare(tmp_path / "in.txt", out=tmp_path / "o") == 0
    assert texts_of(tmp_path / "o") == ["a\r\nb\n\n\ufeff"]


def test_text_field_names_the_field(tmp_path):
    (tmp_path / "in.json").write_text('{"body": "b", "text": 3}\n')
    assert prepare(tmp_path / "in.json", out=tmp_path / "o", flags=["--text-field", "body"]) == 0
    assert texts_of(tmp_path / "o") == ["b"]


def test_line_longer_than_a_block(tmp_path):
    long = "0123456789" * (documents.BLOCK_BYTES // 4)
    (tmp_path / "in.jsonl").write_text(jsonl("a", long, "b"))
    assert prepare(tmp_path / "in.jsonl", out=tmp_path / "o", flags=["--workers", "2"]) == 0
    assert texts_of(tmp_path / "o") == ["a", long, "b"]


def test_blocks_hold_neighbours_up_to_the_limit(tmp_path, monkeypatch):
    """Memory is bounded: no block passes the limit unless one line does."""
    monkeypatch.setattr(documents, "BLOCK_BYTES", 100)
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"x" * 39 + b"\n" + (b"y" * 19 + b"\n") * 20 + b"z" * 300)
    found = list(documents.blocks([(str(source), source.stat().st_size)]))
    assert [len(block.pieces) for block in found] == [4, 5, 5, 5, 2, 1]
    assert b"".join(piece.raw for block in found for piece in block.pieces) == source.read_bytes()
    assert [piece.line for block in found for piece in block.pieces] == list(range(1, 23))
    assert sum(block.num_bytes for block in found) == source.stat().st_size


def test_document_too_long_for_the_index_is_bad(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(documents, "MAX_DOCUMENT_TOKENS", 5)
    (tmp_path / "in.jsonl").write_text(jsonl("1234", "12345"))
    assert prepare(tmp_path / "in.jsonl", out=tmp_path / "o") == 2
    assert f"{tmp_path}/in.jsonl:2: 5 tokens are too many" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("inputs", "flags", "words"),
    [
        (["absent"], [], "absent cannot be read (No such file"),
        (["folder/link.txt"], [], "link.txt cannot be read (No such file"),
        (["folder"], [], "link.txt cannot be read (No such file"),
        (["/dev/null"], [], "is no regular file"),
        (["empty.txt"], [], "holds no document (1 empty, 0 bad)"),
        (["bad.jsonl"], ["--on-error", "skip"], "holds no document (0 empty, 1 bad)"),
        (["hollow"], [], "holds no file that ends in .txt"),
        (["a.txt"], ["--suffix", "txt"], "write .txt"),
        (["a.txt"], ["--workers", "0"], "--workers must be at least 1, got 0"),
        (["a.txt"], ["--tokenizer", "absent"], "--tokenizer 'absent' does not exist"),
        (["a.txt"], ["--output-prefix", "out/"], "names a folder"),
        (["a.txt"], ["--output-prefix", "a.txt/d"], "its folder cannot be made"),
        (
            ["a.txt"],
            ["--output-prefix", "done"],
            "done.idx exists; remove it, or choose another --output-prefix",
        ),
    ],
)
def test_refusals_are_one_line_and_leave_nothing(inputs, flags, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, content in {"a.txt": "a", "empty.txt": "", "bad.jsonl": "{", "done.idx": ""}.items():
        Path(name).write_text(content)
    for name in "folder", "hollow":
        Path(name).mkdir()
    Path("folder/link.txt").symlink_to("nowhere")
    before = sorted(Path().rglob("*"))
    assert prepare(*inputs, out="o", flags=flags) == 2
    error = capsys.readouterr().err
    last = error.splitlines()[-1]
    assert last.startswith("error: ")
    assert words in last
    assert all(line.startswith("skipped ") for line in error.splitlines()[:-1])
    assert sorted(Path().rglob("*")) == before


def test_interrupted_job_leaves_nothing(tmp_path, monkeypatch, capsys):
    """Ctrl-C after some blocks are written."""
    monkeypatch.setattr(documents, "BLOCK_BYTES", 10)
    encode = documents.Encoder.__call__
    seen = []

    def interrupted(self, block):
        seen.append([p.name for p in (tmp_path / "out").iterdir()])
        if len(seen) == 5:
            raise KeyboardInterrupt
        return encode(self, block)

    monkeypatch.setattr(documents.Encoder, "__call__", interrupted)
    (tmp_path / "in.jsonl").write_text(jsonl(*"abcdefgh"))
    assert prepare(tmp_path / "in.jsonl", out=tmp_path / "out/d") == 130
    assert capsys.readouterr().err == "error: interrupted.\n"
    assert not {name for names in seen for name in names} & {"d.bin", "d.idx"}
    assert list((tmp_path / "out").iterdir()) == []


def test_terminated_job_leaves_nothing(tmp_path):
    """A scheduler's SIGTERM to the real command, with workers at work."""
    source = tmp_path / "in.jsonl"
    source.write_text(jsonl("x" * 1000) * 1000)
    argv = [sys.executable, "-m", "megatron_gdn", "prepare-data", "--tokenizer", "byte", "--workers", "2"]
    argv += ["--output-prefix", str(tmp_path / "out/d"), "--input", *[str(source)] * 2000]
    job = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not any(path.stat().st_size for path in tmp_path.glob("out/*")):
            assert job.poll() is None, job.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)
        output, error = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode == 128 + signal.SIGTERM
    assert output == ""
    assert "Traceback" not in error
    assert list((tmp_path / "out").iterdir()) == []


def test_command_line_starts_without_torch():
    code = "import sys; from megatron_gdn.__main__ import main\ntry: main(['--help'])\n"
    code += (
        "except SystemExit: pass\nsys.exit(bool({'torch', 'megatron', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "prepare-data" in done.stdout


@pytest.fixture
def dataset(tmp_path) -> Path:
    """Prefix of a good dataset of 30 documents."""
    (tmp_path / "in.jsonl").write_text(jsonl(*[chr(97 + n % 26) * (n + 1) for n in range(30)]))
    assert prepare(tmp_path / "in.jsonl", out=tmp_path / "d") == 0
    return tmp_path / "d"


def test_check_takes_a_good_dataset(dataset):
    check_dataset(str(dataset), vocab_size=257)


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_check_refuses_every_cut(ending, dataset):
    """A file cut at any byte, or with a byte too many, is one ValueError and no traceback from numpy."""
    path = Path(f"{dataset}{ending}")
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="--data-path") as caught:
            check_dataset(str(dataset), vocab_size=257)
        assert f"d{ending}" in str(caught.value)
        assert "again" in str(caught.value)
    path.write_bytes(whole + b"\0")
    with pytest.raises(ValueError, match="--data-path"):
        check_dataset(str(dataset), vocab_size=257)


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_check_refuses_a_missing_file(ending, dataset):
    Path(f"{dataset}{ending}").unlink()
    with pytest.raises(ValueError, match=rf"--data-path .*d\{ending} cannot be read .*without .bin and .idx"):
        check_dataset(str(dataset), vocab_size=257)


@pytest.mark.parametrize(
    ("offset", "value", "words"),
    [(0, b"X", "is no index"), (9, b"\2", "is no index"), (17, b"\x63", "unknown number type 99")],
)
def test_check_refuses_another_kind_of_file(offset, value, words, dataset):
    path = Path(f"{dataset}.idx")
    content = bytearray(path.read_bytes())
    content[offset : offset + 1] = value
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"--data-path .*{words}"):
        check_dataset(str(dataset), vocab_size=257)


@pytest.mark.parametrize("token", [0, -1])
def test_check_refuses_ids_beyond_the_vocabulary(token, dataset):
    """In the first and in the last document."""
    ids = np.fromfile(f"{dataset}.bin", dtype=np.uint16)
    ids[token] = 300
    ids.tofile(f"{dataset}.bin")
    with pytest.raises(ValueError, match="to 300, but the vocabulary has 257; pass the --tokenizer"):
        check_dataset(str(dataset), vocab_size=257)
    check_dataset(str(dataset), vocab_size=301)


def gpt_dataset(prefix: Path, split: Split) -> GPTDataset:
    """The host's dataset of samples of 16 tokens with document borders."""
    low_level = IndexedDataset(str(prefix))
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=16,
        blend=([str(prefix)], None),
        split="1,0,0",
        path_to_cache=str(prefix.parent / "cache"),
        tokenizer=ByteTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        inter_document_masking=True,
        drop_last_partial_validation_sequence=False,
    )
    return GPTDataset(low_level, str(prefix), np.arange(len(low_level)), None, split, config)


@pytest.mark.parametrize("split", [Split.train, Split.valid])
def test_samples_of_the_host_hold_what_was_written(split, tmp_path):
    """Tokens, labels, document borders; the loss leaves out padding, and no byte of a document."""
    written = ["\x00\x01" * (n * 5 % 13) + chr(97 + n) for n in range(20)]
    (tmp_path / "in.jsonl").write_text(jsonl(*written))
    assert prepare(tmp_path / "in.jsonl", out=tmp_path / "d") == 0
    dataset = gpt_dataset(tmp_path / "d", split)

    order = dataset.document_index.tolist()
    assert sorted(order) == list(range(20))
    documents_in_order = [[*written[n].encode(), EOD] for n in order]
    stream = [token for document in documents_in_order for token in document]
    ends = np.cumsum([len(document) for document in documents_in_order]).tolist()
    for number, sample in enumerate(dataset):
        start = int(dataset.shuffle_index[number]) * 16
        real = min(16, len(stream) - 1 - start)
        padding = [0] * (16 - real)
        assert sample["labels"].tolist() == stream[start + 1 : start + 1 + real] + padding
        assert sample["loss_mask"].tolist() == [1.0] * real + padding
        assert sample["tokens"].tolist()[:real] == stream[start : start + real]
        borders = [end - start for end in ends if start < end < min(start + 16, len(stream))]
        cu_seqlens = sample["cu_seqlens"].tolist()
        assert cu_seqlens == [0, *borders, *[16] * (16 - len(borders))]
    assert number + 1 == len(dataset) == -(-(len(stream) - 1) // 16) - (split is Split.train)
