"""One text through a pretrained model, token by token: what ``amos inspect`` computes and shows."""
