"""A Flower app: image classification with cohorts picked by label entropy."""
