"""lm-evaluation-harness in this process: `python evaluate.py --model zinc_rt --tasks TASKS`."""

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from zinc_rt import LLM, SamplingParams


@register_model("zinc_rt")
class ZincLM(TemplateLM):
    def __init__(self, model=None, batch_size=None, max_batch_size=None, device=None, **settings):
        super().__init__()
        self.llm = LLM(model, progress=False, **settings)  # --model_args model=NAME,tier=native
        self.max_context = self.llm.context - 1  # as lm_eval cuts texts for a server

    @property
    def eot_token_id(self):
        bos = self.llm.tokenizer.bos_id
        return self.llm.tokenizer.eos_id if bos is None else bos

    def tok_encode(self, string, add_special_tokens=None, **_):
        return self.llm.tokenizer.encode(string, parse_special=True, add_bos=False)

    def _loglikelihood_tokens(self, requests, **_):
        texts = [[*context, *target][-self.max_context :] for _, context, target in requests]
        starts = [len(t) - len(one[2]) for t, one in zip(texts, requests, strict=True)]
        scores = self.llm.score(texts, start=starts)  # the same bits on every tier
        return [(sum(s.log_probabilities[s.start :].tolist()), s.greedy) for s in scores]

    def loglikelihood_rolling(self, requests, **_):
        for tokens in (self.tok_encode(request.args[0]) for request in requests):
            windows = get_rolling_token_windows(tokens, self.eot_token_id, self.max_context - 1, 1)
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            yield sum(log for log, _ in self._loglikelihood_tokens(parts))

    def generate_until(self, requests, **_):
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        said = [
            SamplingParams(max_tokens=asked.get("max_gen_toks", 256), stop=asked["until"])
            for _, asked in (request.args for request in requests)
        ]
        return [output.text for output in self.llm.generate(prompts, said)]


if __name__ == "__main__":
    cli_evaluate()
