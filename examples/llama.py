"""The training step of Llama 3 8B at its real size, FSDP over ``data``: shapes only, to be planned for any machine.

``meshdsl plan examples/llama.py --mesh data=64 --topology tpu-v5p``
"""

from meshdsl import models

program = models.build("llama3-8b", "fsdp", batch=512, seq=2048)
