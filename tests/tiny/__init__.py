from omni_async.stages.torchvision_operators import make_torchvision_importable

# transformers, of which the checkpoints are made, imports it where it is installed.
make_torchvision_importable()
