import signal

import torch

torch.set_num_threads(1)  # the models under test are tiny: waking a second thread costs more than it saves
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would the tests'
