"""Which cells run, in which process, on which device or in the place of which? And how long do they take?"""
