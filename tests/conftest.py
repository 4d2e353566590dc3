import torch

torch.set_num_threads(1)  # the models under test are tiny: waking a second thread costs more than it saves
