"""Tuning, all of it: every arm is tuned alike on seeds of its own, before the best of each is compared on others.

    search         what is tried next, and the loop that has it made
    trials         what was tried, and what is best
    luck           how unsure that is: what an optimizer may have lost by the luck of its tuning
    sensitivity    how much an optimizer depends on the tuned option

What is asked for, a `SearchSpace`, is kept in study.json and so stands with the other plain data in `specs`. Judging
says what a run's score is. The figures and tables of a tuning are in `showing.tuning`.
"""
