# For teachers who use nbgrader: run it in this folder. The whole course is one assignment, named "source", with one notebook
# per chapter:  nbgrader generate_assignment source   (then release, collect and autograde with the same name).
c = get_config()  # noqa: F821 (nbgrader defines it)
c.CourseDirectory.course_id = "minitrain"
c.CourseDirectory.source_directory = "."
c.CourseDirectory.directory_structure = "{nbgrader_step}/{student_id}/{assignment_id}"
c.CourseDirectory.ignore = [".ipynb_checkpoints", "*.pyc", "__pycache__", "*.py"]
c.ExecutePreprocessor.timeout = 300
