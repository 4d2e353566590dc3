"""A GPT as a model of the lm-evaluation-harness (package lm_eval)."""

from collections import defaultdict

import torch
import torch.nn.functional as F
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

MAX_NEW_TOKENS = 256  # where a task does not say it


class Harness(TemplateLM):
    """Scores and texts as the harness's own Hugging Face model gives them."""

    def __init__(self, model, tokenizer, machine, batch):
        super().__init__()
        self.model, self.ids, self.machine, self.batch = model, tokenizer, machine, batch
        self.block_size = model.config.block_size

    @property
    def eot_token_id(self):
        return self.ids.eot_id

    def tok_encode(self, string, add_special_tokens=None):
        """Ours adds none."""
        return [int(i) for i in self.ids.encode(string)]

    def batches(self, items, length):
        """(numbers, items) of a batch, the longest first: rows are padded little, and memory runs out at once."""
        order = sorted(range(len(items)), key=lambda i: -length(items[i]))
        for start in tqdm(range(0, len(order), self.batch), "evaluating", disable=None):
            numbers = order[start : start + self.batch]
            yield numbers, [items[i] for i in numbers]

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests, disable_tqdm=False):
        """For (_, context, continuation) the continuation's log-probability, and whether it is the most likely one."""
        results = [None] * len(requests)
        pairs = [(context + continuation, len(continuation)) for _, context, continuation in requests]
        for numbers, batch in self.batches(pairs, lambda pair: len(pair[0])):
            rows = [torch.tensor(ids[-self.block_size - 1 :]) for ids, _ in batch]  # too long: without the beginning
            x = torch.nn.utils.rnn.pad_sequence([row[:-1] for row in rows], batch_first=True).to(self.machine.device)
            with self.machine.autocast():
                hidden = self.model.norm_f(self.model.hidden(x))
                for number, row, states, (_, n) in zip(numbers, rows, hidden, batch, strict=True):
                    n = min(n, self.block_size)
                    end = len(row) - 1
                    scores = F.log_softmax(self.model.lm_head(states[end - n : end]).float(), dim=-1)
                    targets = row[-n:].to(scores.device)
                    total = scores.gather(1, targets[:, None]).sum().item()
                    results[number] = total, torch.equal(scores.argmax(dim=1), targets)
        return results

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """The log-probability of whole texts, in windows that do not overlap but for a token of context."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            rolling = get_rolling_token_windows(ids, self.eot_token_id, self.block_size, context_len=1)
            for window in map(make_disjoint_window, rolling):
                windows.append((None, *window))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += score
        return totals

    def generate_until(self, requests, disable_tqdm=False):
        """Texts up to one of the task's stop words. Prompts of one length and one kind are continued together."""
        texts, alike = [None] * len(requests), defaultdict(list)
        for number, request in enumerate(requests):
            prompt, options = request.args
            most = int(options.get("max_gen_toks", MAX_NEW_TOKENS))
            kept = max(1, self.block_size - most)  # of the prompt, so that the new tokens have room behind it
            ids = self.tok_encode(prompt)[-kept:] or [self.eot_token_id]
            alike[len(ids), most, str(options)].append((number, ids, options))
        for (_, most, _), jobs in sorted(alike.items(), reverse=True):
            for start in range(0, len(jobs), self.batch):
                numbers, prompts, options = zip(*jobs[start : start + self.batch], strict=True)
                for number, text in zip(numbers, self.continue_prompts(prompts, most, options[0]), strict=True):
                    texts[number] = text
        return texts

    def continue_prompts(self, prompts, most, options):
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else until
        sampled = options.get("do_sample", False)
        steps = self.model.stream(
            torch.tensor(prompts, device=self.machine.device),
            most,
            options.get("temperature", 1.0) if sampled else 0.0,
            options.get("top_k") or None,
            options.get("top_p"),
            stop_id=self.eot_token_id,
            real_vocab=self.ids.vocab_size,
        )
        rows, texts = [[] for _ in prompts], [""] * len(prompts)
        for step in steps:
            for row, next_id in zip(rows, step.tolist(), strict=True):
                row.append(next_id)  # behind the end of a text only more ends
            texts = [self.text_of(row) for row in rows]
            pairs = zip(rows, texts, strict=True)
            ended = [row[-1] == self.eot_token_id or any(word in text for word in until) for row, text in pairs]
            if all(ended):
                break
        for word in filter(None, until):
            texts = [text.split(word)[0] for text in texts]
        return texts

    def text_of(self, ids):
        ids = [i for i in ids if i != self.eot_token_id]
        return self.ids.decode_bytes(ids).decode(errors="replace")
