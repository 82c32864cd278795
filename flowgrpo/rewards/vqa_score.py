"""VQAScore (Lin et al. 2024, 2404.01291): probability that a question-answering model says yes to the prompt.

The model is InstructBLIP on Flan-T5, one of the paper's, in transformers. The paper's best, CLIP-FlanT5, is not in
transformers and needs its own code.
"""

from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from flowgrpo.errors import UserError
from flowgrpo.rewards.about import About, built_in
from flowgrpo.rewards.local_model import ImageModel, load_parts
from flowgrpo.rewards.preprocessing import Preparation

LONGEST = 128  # tokens of a question


@built_in("vqascore", "alignment prompt following faithful")
class VqaScore(ImageModel):
    """VQAScore: the probability of the answer "yes" to whether the image shows its prompt.

    As in the release, it is the geometric mean over the answer's tokens, including the end of the text, each given
    those before it.

    model, revision: an InstructBLIP of transformers on an encoder-decoder, a folder or hub id.
    question: with {} for the prompt. answer: the one whose probability counts.
    parts: model, its tokenizer and its Q-Former's tokenizer, ready-made. dtype (bf16), device and batch_size (8): as in
    `LocalModel`.
    Raises UserError for a question without {}, and if the weights are unavailable.
    """

    model: str = "Salesforce/instructblip-flan-t5-xl"
    revision: str | None = None
    question: str = 'Question: Does this figure show "{}"? Please answer yes or no.'
    answer: str = "yes"
    dtype: str = field(default="bf16", kw_only=True)
    batch_size: int = field(default=8, kw_only=True)
    reward, parameters = "vqascore", 4.02e9
    differentiable = True
    within = ""  # the argument that holds these options
    about = About(modality="image", range=(0, 1), needs="", licence="Apache-2.0, MIT weights")

    def __post_init__(self) -> None:
        if "{}" not in self.question:
            raise UserError(f"reward {self.reward!r}: question is {self.question!r}, expected one with {{}} for the "
                            "prompt")
        super().__post_init__()

    def _require(self, parts: tuple[Any, ...]) -> None:
        if getattr(parts[0].config, "use_decoder_only_language_model", True):
            raise UserError(f"reward {self.reward!r}: {self.model} is no InstructBLIP on an encoder-decoder: expected "
                            "one such as Salesforce/instructblip-flan-t5-xl")

    def _load(self) -> tuple[Any, Any, Any]:
        model, processor = load_parts(self, "InstructBlipForConditionalGeneration", "InstructBlipProcessor",
                                      within=self.within, dtype=self.float_type)
        return model, processor.tokenizer, processor.qformer_tokenizer

    def _scores(self, images: Tensor, prompts: list[str]) -> Tensor:
        model, tokenizer, _ = self.models
        questions = [self.question.replace("{}", prompt) for prompt in prompts]
        tokens = self._tokens(tokenizer, questions)
        seen = self._visual_inputs(images, questions)
        words = model.get_input_embeddings()(tokens.input_ids)
        answer = tokenizer([self.answer] * len(prompts), return_tensors="pt").input_ids.to(self.device)
        ones = tokens.attention_mask.new_ones(seen.shape[:2])
        logits = model.language_model(inputs_embeds=torch.cat([seen.to(words), words], 1), labels=answer,
                                      attention_mask=torch.cat([ones, tokens.attention_mask], 1)).logits
        return logits.float().log_softmax(-1).gather(-1, answer[..., None])[..., 0].mean(1).exp()

    def _visual_inputs(self, images: Tensor, questions: list[str]) -> Tensor:
        """The language model's visual inputs of the images, [B, queries, D]: the Q-Former reads the question too."""
        model, _, tokenizer = self.models
        pictures = Preparation(model.config.vision_config.image_size)(images.to(self.device))
        features = model.vision_model(pixel_values=pictures.to(model.dtype)).last_hidden_state
        tokens = self._tokens(tokenizer, questions)
        queries = model.query_tokens.expand(len(questions), -1, -1).to(features)
        mask = torch.cat([tokens.attention_mask.new_ones(queries.shape[:2]), tokens.attention_mask], 1)
        states = model.qformer(input_ids=tokens.input_ids, attention_mask=mask, query_embeds=queries,
                               encoder_hidden_states=features).last_hidden_state
        return model.language_projection(states[:, :queries.shape[1]])

    def _tokens(self, tokenizer: Any, texts: list[str]) -> Any:
        tokens = tokenizer(texts, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
        return tokens.to(self.device)
