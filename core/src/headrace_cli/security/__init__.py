"""Review which operations of a server are open to which callers, and profiles that close operations to strangers.

::

    SecurityReview      all that is open, from the parts of a composed server     (review)
    ClosedOperations    refuses operations to everybody                           (closed_operations)
    enforce             what ``--security-profile`` asks for at start             (profiles)
"""
