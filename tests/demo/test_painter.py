"""The painter's training forward against the transformer's own."""

import dataclasses

import pytest

pytestmark = pytest.mark.model


def test_the_batched_forward_gives_what_the_stock_forward_gives() -> None:
    import torch

    import train_dit

    torch.manual_seed(0)
    settings = dataclasses.replace(train_dit.FULL, layers=1)
    model = train_dit.make_transformer(settings, latent_channels=8, caption_width=16)
    latents, time = torch.randn(3, 8, 16, 16), torch.rand(3)
    captions, lengths = torch.randn(3, train_dit.CAPTION, 16), torch.tensor([17, 5, 32])
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn_like(weight)  # the padding token is zero at first
        stock = model(
            list(latents.unsqueeze(2)),
            time,
            [caption[:length] for caption, length in zip(captions, lengths, strict=True)],
            return_dict=False,
        )[0]
        batched = train_dit.batched_forward(model, latents, time, captions, lengths)
    torch.testing.assert_close(batched, torch.stack(stock).squeeze(2))
