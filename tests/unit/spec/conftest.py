import pytest

SPEC = """\
name: job
model:
  config: {model_type: llama, hidden_size: 32}
data:
  train: data.jsonl
  tokenizer: {path: tokenizer}
  seq_len: 64
training:
  global_batch_size: 8
  steps: 10
"""


@pytest.fixture
def spec_file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(SPEC, encoding="utf-8")
    return path
