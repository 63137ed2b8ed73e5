from omni_async.stages.torchvision_operators import make_torchvision_importable

# transformers imports it where it is installed.
make_torchvision_importable()
