"""x"""

from fedentopt.simulation.trainers.choice import (
    Room,
    Trainer,
    choose_trainer,
    make_trainer,
    resolve_device,
    wants_channels_last,
)
