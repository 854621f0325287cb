"""Every kernel of ours on its small cases, each in one dtype in turn, for compute-sanitizer (test_sanitizer_gpu.py).


python tests/gpu/sanitizer_cases.py BACKEND [OP ..]
"""

from __future__ import annotations

import sys

import torch

from ferryman.device_profiles import detect
from ferryman.dispatch import registry, select
from ferryman.porting.inputs.cases import arguments, cases_of

DTYPES = (torch.float32, torch.bfloat16)


def main(backend: str, ops: list[str]) -> int:
    device = torch.device("cuda", 0)
    profile = detect(device)
    target, ran = select.target_of(profile), 0
    for name in ops or list(registry.primitives()):
        op = registry.primitive(name)
        for line in registry.implementations(name):
            if line.backend != backend:
                continue
            kernel = registry.launcher(line)
            for index, case in enumerate(cases_of(op, "small")):
                values = arguments(case, op, DTYPES[index % len(DTYPES)], 0, device).values
                if not select.refusals(line, select.View.of(op, values, profile), profile):
                    with torch.no_grad():
                        kernel(*values, target)
                    ran += 1
    torch.cuda.synchronize(device)
    sys.stdout.write(f"{backend}: {ran} launches\n")
    return 0 if ran else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2:]))
