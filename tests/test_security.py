"""What a run must never do: run code that comes with a model, or write down a secret."""

import json
import shutil
import subprocess
import sys

import pytest

from tasks.prompts import load_tokenizer
from tasks.train.fsdp import load_model, process_group

CODE = """
from pathlib import Path
Path({touched!r}).touch()
from transformers import Qwen3Config as Config, Qwen3ForCausalLM as Model, PreTrainedTokenizerFast as Tokenizer
"""


@pytest.fixture
def model_with_code(tmp_path, tiny_model):
    """A model directory whose own code leaves a trace when it runs."""
    directory, touched = tmp_path / "model", tmp_path / "touched"
    shutil.copytree(tiny_model, directory)
    (directory / "code.py").write_text(CODE.format(touched=str(touched)))
    maps = {
        "AutoConfig": "code.Config",
        "AutoModelForCausalLM": "code.Model",
        "AutoTokenizer": ["code.Tokenizer", None],
    }
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(content | {"auto_map": maps}))
    return str(directory), touched


def test_code_inside_a_model_does_not_run(model_with_code, make_config):
    directory, touched = model_with_code
    load_tokenizer(directory)
    with process_group():
        load_model(make_config(), directory)
    assert not touched.exists()


def test_code_inside_a_model_runs_where_it_is_trusted(model_with_code):
    """That the test above can fail."""
    directory, touched = model_with_code
    program = "import sys, transformers; transformers.AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)"
    subprocess.run([sys.executable, "-c", program, directory], check=True)  # such code changes its whole process
    assert touched.exists()
