"""`spes-mega plan`: what a recipe needs in memory, network and time, before anything is bought or started."""
