"""JSON schema of a RayJob (ray.io/v1) as KubeRay 1.5.1 and newer take it, written from KubeRay's API reference
(https://ray-project.github.io/kuberay/reference/api/). Every known field is named and any other is refused: the API
server would drop it silently. Pod templates are Kubernetes' own and are checked with the package kubernetes-validate.
"""

STRING, BOOL, INT, NUMBER = {"type": "string"}, {"type": "boolean"}, {"type": "integer"}, {"type": "number"}
STRINGS = {"type": "object", "additionalProperties": STRING}
ANY = {"type": "object"}


def closed(required=(), **properties):
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


COUNT = {"type": "integer", "minimum": 0}
QUANTITIES = {"type": "object", "additionalProperties": {"type": ["string", "integer"]}}
AUTOSCALER = closed(
    env={"type": "array"},
    envFrom={"type": "array"},
    idleTimeoutSeconds=COUNT,
    image=STRING,
    imagePullPolicy=STRING,
    resources=closed(limits=QUANTITIES, requests=QUANTITIES),
    securityContext=ANY,
    upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
    version={"enum": ["v1", "v2"]},
    volumeMounts={"type": "array"},
)
HEAD = closed(
    ("template",),
    enableIngress=BOOL,
    headService=ANY,
    labels=STRINGS,
    rayStartParams=STRINGS,
    resources=STRINGS,
    serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"]},
    template=ANY,
)
WORKERS = closed(
    ("groupName", "maxReplicas", "minReplicas", "template"),
    groupName=STRING,
    idleTimeoutSeconds=COUNT,
    labels=STRINGS,
    maxReplicas=COUNT,
    minReplicas=COUNT,
    numOfHosts={"type": "integer", "minimum": 1},
    rayStartParams=STRINGS,
    replicas=COUNT,
    resources=STRINGS,
    scaleStrategy=ANY,
    suspend=BOOL,
    template=ANY,
)
CLUSTER = closed(
    ("headGroupSpec",),
    authOptions=closed(mode={"enum": ["disabled", "token"]}, secretName=STRING, enableK8sTokenAuth=BOOL),
    autoscalerOptions=AUTOSCALER,
    enableInTreeAutoscaling=BOOL,
    gcsFaultToleranceOptions=ANY,
    headGroupSpec=HEAD,
    headServiceAnnotations=STRINGS,
    managedBy=STRING,
    rayVersion={"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
    suspend=BOOL,
    upgradeStrategy=ANY,
    workerGroupSpecs={"type": "array", "items": WORKERS},
)
SPEC = closed(
    activeDeadlineSeconds=INT,
    backoffLimit=COUNT,
    clusterSelector=STRINGS,
    deletionStrategy=ANY,
    entrypoint=STRING,
    entrypointNumCpus=NUMBER,
    entrypointNumGpus=NUMBER,
    entrypointResources=STRING,
    jobId=STRING,
    managedBy=STRING,
    metadata=STRINGS,
    preRunningDeadlineSeconds=INT,
    rayClusterSpec=CLUSTER,
    runtimeEnvYAML=STRING,
    shutdownAfterJobFinishes=BOOL,
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
    submitterConfig=closed(backoffLimit=COUNT),
    submitterPodTemplate=ANY,
    suspend=BOOL,
    ttlSecondsAfterFinished=COUNT,
)
RAYJOB = closed(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=ANY,
    spec=SPEC,
)
