"""GGUF to a transformers directory in float32: `python -m eagle_pangu.speculation.conversion GGUF OUTPUT`.

De-quantisation is lossless in float32 (not in bfloat16: scale times a four-bit level needs more mantissa). Writes
``STEP/STEPS`` to stdout as it goes on. It knows nothing of where the file came from.
"""

from __future__ import annotations

import sys
from pathlib import Path

STEPS = 4
MAGIC = b"GGUF"


def convert(gguf: Path, output: Path) -> None:
    """Write config, weights and tokenizer of the model in `gguf` to `output`."""
    _report(0)
    with gguf.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise SystemExit(f"{gguf} is not a GGUF file")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _report(1)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    _report(2)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _report(3)
    # The weights are plain float32 now, but transformers refuses to save a model that says it was quantised.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    for path in output.iterdir():
        path.chmod(0o644)  # weights are written for their owner only; an image is built by one user and run by another
    _report(STEPS)


def _report(step: int) -> None:
    sys.stdout.write(f"{step}/{STEPS}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
