"""Prefill of prompts by steps; tok/s and a hash of the logits."""
import hashlib, os, sys, time
import numpy as np
from pathlib import Path
if os.environ.get("OLD"):
    import accel.cuda.registered as r, accel.cuda.plan as p
    rules = tuple(x for x in r.RULES if x.__name__ != "attention_groups_rule")
    r.RULES = rules
    if hasattr(p, "RULES"): p.RULES = rules
import accel.cuda.attention as att
extra = {k: int(v) for k, v in (x.split("=") for x in os.environ.get("MACROS", "").split(",") if x)}
whole = att._batch_macros
att._batch_macros = lambda ops: {**whole(ops), **extra}
import accel.cuda.matrices as mat
if os.environ.get("APART"):
    grouped = mat._grouped
    mat._shapes_beside = lambda ops, run, shared, device: tuple(mat._group_shape(ops, run, n, device, False) for n in shared)
    mat._grouped = lambda *a, **k: grouped(*a, **{**k, "beside": False, "followed": False})
from accel.cuda.tier import CudaTier
from accel.cuda.runtime import Choices
from contract.dtypes import I12
from contract.records import QUERY_TOKEN
from contract.types import SamplingParams
from reference.limits import whole_contexts
from reference.model.open import open_model
from reference.runner import ModelRunner, StepInput
from reference.sched.slots import sampling_record
model = open_model(sys.argv[1])
prompts = [int(x) for x in os.environ.get("PROMPTS", "512,2048,8192,32768").split(",")]
steps = [int(x) for x in os.environ.get("STEPS", "512").split(",")]
name = ("old" if os.environ.get("OLD") else "new") + (" apart" if os.environ.get("APART") else "")
with CudaTier(choices=Choices(cache=Path("/tmp/cubins-prompt"))) as tier:
    for chunk in steps:
        t = time.perf_counter()
        runner = ModelRunner(model, tier, whole_contexts(1, max(prompts) + 16, I12, step_tokens=chunk, step_rows=1))
        runner.prepare()
        print(f"ready after {time.perf_counter() - t:.1f} s", flush=True)
        pages = np.arange(runner.limits.slot_pages, dtype=np.int32)[None]
        def step(start, count, wanted=()):
            query = np.zeros(count, QUERY_TOKEN)
            query["token"] = (np.arange(start, start + count) * 7919) % 4096
            query["position"] = np.arange(start, start + count)
            return StepInput(query=query, output_rows=np.array([count - 1], np.int32), wanted=wanted,
                             sampling=sampling_record(SamplingParams(), 0, start + count)[None], page_table=pages)
        for prompt in prompts:
            best, digest = 1e9, ""
            for attempt in range(int(os.environ.get('TIMES', 0)) or 3 if prompt <= 2048 else 2 if prompt <= 8192 else 1):
                t = time.perf_counter()
                last = None
                ahead = []
                for start in range(0, prompt, chunk):
                    ahead.append(runner.submit(step(start, min(chunk, prompt - start))))
                    if len(ahead) > 4: runner.collect(ahead.pop(0))
                while ahead: last = runner.collect(ahead.pop(0))
                best = min(best, time.perf_counter() - t)
            out = runner.step(step(prompt, 1, ("output.logits",)))
            digest = hashlib.sha256(out.logits.tobytes()).hexdigest()[:12]
            print(f"{name} step {chunk} prompt {prompt}: {prompt / best:.0f} tok/s {best * 1e3:.2f} ms {digest}", flush=True)
        runner.close()
