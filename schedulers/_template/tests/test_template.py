from headrace_testing import SchedulerConformance


class TestTemplate(SchedulerConformance):
    plugin, scheduler = "headrace_template_scheduler", "template"
    longest_wait_ns = 200_000_000  # of a request, while others keep coming
