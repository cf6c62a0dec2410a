"""What a server has open to whom, and profiles that close what strangers should not have.

::

    SecurityReview      all that is open, from the parts of a composed server     (review)
    ClosedOperations    refuses operations to everybody                           (closed_operations)
    enforce             what ``--security-profile`` asks for at start             (profiles)
"""
