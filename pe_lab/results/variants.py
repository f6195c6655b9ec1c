"""The variants of a model that evaluation measures and reports know, by the key `method` of a result record."""

# In the order of tables. The first is always possible.
VARIANTS = ("as trained", "cropped", "PI", "NTK", "YaRN", "beta", "paper beta", "dropped")
SCALINGS = ("PI", "NTK", "YaRN")
# Up to the training length these leave a model as it was trained.
UNCHANGED_IN_TRAINING_LENGTH = ("cropped", *SCALINGS, "beta", "paper beta")
