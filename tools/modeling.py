"""
A GPT as a model of Hugging Face's transformers. tools/export.py writes this file and all that it needs of the others as
one modeling_regpt.py into the folder of an exported model.
"""

from typing import ClassVar

import torch.nn.functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from lib.errors import refuse
from lib.generation import Cache
from model import GPT, GPTConfig


class ReGPTConfig(PretrainedConfig):
    model_type = "regpt"

    def __init__(self, gpt=None, **others):
        super().__init__(**others)
        self.gpt = gpt or {}  # the settings of GPTConfig


class ReGPTCache(Cache):
    def get_seq_length(self):
        return self.position

    def reorder_cache(self, beams):
        refuse(True, "this model generates without beams: set num_beams=1")


class ReGPTForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = ReGPTConfig
    _tied_weights_keys: ClassVar = {"model.lm_head.weight": "model.wte.weight"}  # where tie_word_embeddings says so

    def __init__(self, config):
        super().__init__(config)
        self.model = GPT(GPTConfig(**config.gpt))
        self.post_init()

    def _init_weights(self, module):
        """The GPT has made them."""

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False  # the modes keep more than keys and values: forward makes a cache of our own

    def get_input_embeddings(self):
        return self.model.wte

    def get_output_embeddings(self):
        return self.model.lm_head

    def forward(
        self, input_ids, attention_mask=None, labels=None, past_key_values=None, use_cache=False, return_dict=True
    ):
        """Logits at every position. Shorter rows are padded on the right; with a cache all rows are of one length."""
        if attention_mask is not None:
            refuse((attention_mask[:, 1:] > attention_mask[:, :-1]).any(), "pad on the right: padding_side='right'")
            refuse(use_cache and not attention_mask.all(), "generate for prompts of one length, or one by one")
        if use_cache and past_key_values is None:
            past_key_values = ReGPTCache(len(input_ids), self.model.config.block_size)
        logits = self.model.lm_head(self.model.norm_f(self.model.hidden(input_ids, past_key_values)))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
