"""A converted checkpoint, made once."""

from pathlib import Path

import pytest

from megatron_gdn.__main__ import main
from tests.helpers.hf import save_model, to_megatron_flags


@pytest.fixture(scope="session")
def dense(tmp_path_factory) -> Path:
    """A dense bf16 checkpoint of three files in hf/, converted in megatron/; not to be changed."""
    folder = tmp_path_factory.mktemp("dense")
    save_model("dense", folder / "hf")
    assert main(to_megatron_flags(folder)) == 0
    return folder
