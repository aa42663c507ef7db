"""Small data for training, and the training script imported once, so that ranks can be forked from here."""

import argparse
import shutil
import sysconfig
from pathlib import Path

import pytest

from megatron_gdn import prepare_data
from tests.conftest import NUM_DEVICES


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there are GPUs, `pretrain_qwen35` would use them, and CUDA does not survive a fork."""
    if NUM_DEVICES:
        reason = f"forks ranks that must find no GPU, found {NUM_DEVICES}; set CUDA_VISIBLE_DEVICES="
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason))


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> str:
    """Prefix of a data set of bytes: some of the standard library's own modules, each a document."""
    prefix = str(tmp_path_factory.mktemp("data") / "modules")
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py"))
    parser = argparse.ArgumentParser()
    prepare_data.add_arguments(parser)
    flags = ["--output-prefix", prefix, "--tokenizer", "byte", "--workers", "1", "--input"]
    prepare_data.main(parser.parse_args([*flags, *map(str, modules)]))
    return prefix


@pytest.fixture(scope="session", autouse=True)
def training_script() -> None:
    """Import the training script, once for all ranks."""
    if not NUM_DEVICES:
        import pretrain_qwen35  # noqa: F401


@pytest.fixture
def torchrun(tmp_path) -> Path:
    """Stands for torchrun: says what it is given, one word a line, and exits with $STATUS."""
    path = tmp_path / "torchrun"
    path.write_text(f"#!{shutil.which('bash')}\nprintf '%s\\n' \"$@\"\nexit ${{STATUS:-0}}\n")
    path.chmod(0o755)
    return path
